"""One module per verb of the command line: its options, the call, what is printed. Rooms are imported when called."""
