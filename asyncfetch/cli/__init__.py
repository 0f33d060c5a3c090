"""The command ``asyncfetch``. Needs the extra ``cli``.

app       all commands; ``env``: what is installed, and what doesn't fit together; ``run``: other libraries' commands on
          datasets of ours
dataset   ``info``, ``check``, ``frames``: look at a dataset; bench: how fast it streams here, and why
files     ``ls``, ``cp``: files of any url
merge     ``merge``, ``select``, ``split``, ``convert``
cache     ``cache``: look at a disk cache, check it, make it smaller
terminal  what all of them read and write alike
"""

from __future__ import annotations
