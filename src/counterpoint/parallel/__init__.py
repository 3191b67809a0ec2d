"""Put zero-SM collectives under torch's own parallelism: users call `overlap.py`, which is built on `fsdp/`."""
