"""Read `counterpoint.toml`, which `counterpoint tune` wrote, and find the choice for a call. No torch.

`file.py` reads and writes the file. `choices.py` says which choices apply on a machine, and which of them a call gets.
"""
