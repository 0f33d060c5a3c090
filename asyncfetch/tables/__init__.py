"""Parquet by byte ranges: the columns, rows and pages that are wanted, and nothing else.

parquet     a file's footer, columns and row groups
whole       a whole table, part by part
pages       some pages of a column
packed      compressed files and columns, and how they are unpacked; unpacked: a reader of them, and what it keeps on
            disk
values      where in a file each of a column's byte strings lies
thrift      the structs that Parquet's headers and footers are. Pure
columns     Arrow columns as plain ones, as numbers and as Python objects
"""
