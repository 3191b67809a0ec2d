"""Define the subcommands of the command line, one file each; terminal.py has what they share."""
