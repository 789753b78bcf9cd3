"""Looking at a queue without touching it: what its topics tell, and what is wrong with it. Values in, values out."""
