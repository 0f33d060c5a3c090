"""Collections of videos, as tables of entries.

entries     a table's columns as entries: absolute urls, seconds, names that are taken
tables      tables of spans: Parquet, CSV, JSON lines, in memory
"""
