"""Order of samples, and which rank gets which when: arithmetic on lengths, seeds and ranks, without I/O or waits.

line.py      segments in a drawn order, end to end: an epoch's line, and the pieces that it is cut into
runs.py      what is left of it, and cutting it
lanes.py     a rank's order of its share: a pool of lanes
mixing.py    proportions of a mixture's members
deal.py      what is left of an epoch, dealt to ranks
placement.py which of the ranks and workers this process is
plan.py      one consumer's part
state.py     how much was delivered, as JSON
"""
