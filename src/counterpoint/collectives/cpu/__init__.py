"""Run calls on CPUs: `transport.py` holds the channels, `channel.py` their threads and the calls under way."""
