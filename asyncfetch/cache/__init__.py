"""Which bytes are kept, and where.

- ``memory``: the byte cache, a RangeReader over another one.
- ``lease``: what its callers see: keys, leases, statistics.
- ``space``: who gets room, first come, first served.
- ``range_stream``: many ranges at once, in the order of their arrival.
"""
