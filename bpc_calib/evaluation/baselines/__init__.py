"""Other methods that choose the attended tokens; each is a layer that replaces BPC's in the same cache.

Every method chooses one list of tokens per KV head, of the same length as BPC's. If a method is defined for a single
query head, the scores of a group are reduced to one by BPC's rule (`group_scores`), and counts of collisions by their
maximum. Each class says what differs from its paper because of that.
"""
