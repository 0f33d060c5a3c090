"""Other libraries' interfaces to this one's datasets.

lerobot       LeRobot's dataset classes, and its commands run on them

Nothing here is imported by the rest, and no library before something of its is used.
"""
