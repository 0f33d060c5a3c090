"""The command ``asyncfetch``. Needs the extra ``cli``.

app       all commands; ``env``: installed versions and decoders; ``run``: other libraries' commands on our datasets
dataset   ``info``, ``check``, ``frames``: look at a dataset
bench     ``bench``: how fast a dataset streams here, and why
files     ``ls``, ``cp``: files of any url
merge     ``merge``, ``select``, ``split``, ``convert``
cache     ``cache``: look at a disk cache, check it, make it smaller
terminal  sizes and progress
"""

from __future__ import annotations
