"""Read `counterpoint.toml`, the file of what `counterpoint tune` chose, and find the choice for a call. No torch.

`file.py` reads and writes the file. `choices.py` says which choices count on a machine, and which one a call gets.
"""
