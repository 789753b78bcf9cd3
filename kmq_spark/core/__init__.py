"""The rules of the queue: values in, values out; standard library and numpy, no clock, no input, no output."""
