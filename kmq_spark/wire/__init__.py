"""Encode and decode marker records and message headers: conversion between Kafka records and core values."""
