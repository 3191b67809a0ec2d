"""Run calls on CPUs: `transport.py` holds the channels, `call.py` their threads and the calls under way."""
