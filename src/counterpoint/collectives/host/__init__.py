"""What the ranks of one host share besides data: how they meet, what they show each other, and how they fail.

`group.py` the torch process group; `shared_memory.py` memory that all ranks map; `status.py` a rank's status in it;
`announce.py` compares the calls of the ranks; `watchdog.py` waits for peers, and says why one does not come. Both
executors use all of it.
"""
