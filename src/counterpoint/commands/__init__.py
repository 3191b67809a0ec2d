"""Run the verbs of the command line, one file each; terminal.py is what they share."""
