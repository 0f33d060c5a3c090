"""The command ``asyncfetch``. Needs the extra ``cli``.

app     all commands
cache   ``asyncfetch cache``: look at a disk tier, check it, make it smaller
sizes   bytes as people write and read them
"""

from __future__ import annotations
