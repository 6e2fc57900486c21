"""Processes of tests: the command line, lives that are killed, movers, clocks."""
