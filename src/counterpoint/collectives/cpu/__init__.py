"""Carries calls out on CPUs: `transport.py` holds the channels, `channel.py` their threads and the call under way."""
