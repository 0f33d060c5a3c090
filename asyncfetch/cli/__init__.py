"""The command ``asyncfetch``. Needs the extra ``cli``.

app       all commands; ``env``: installed versions and decoders; ``run``: other libraries' commands on our datasets
source    what a URL is: a LeRobot dataset, or a collection of videos
videos    ``index``, and what other commands show of videos
dataset   ``info``, ``check`` and what it finds, such as a camera that froze, ``frames``: look at a dataset
bench     ``bench``: how fast a dataset streams here, and why
files     ``ls`` and ``cp``: files of any url
merge     ``merge``, ``select``, ``split``, ``convert``
cache     ``cache``: look at a disk cache, check it, make it smaller
terminal  options that commands share, sizes and progress
"""

from __future__ import annotations
