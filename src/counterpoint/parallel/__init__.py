"""Zero-SM collectives under torch's own ways to train in parallel: `overlap.py` for the user, `fsdp/` beneath it."""
