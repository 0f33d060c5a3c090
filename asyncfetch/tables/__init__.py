"""Parquet by byte ranges: the columns, rows and pages that are wanted, and nothing else.

parquet     a file's footer, columns and row groups
pages       some pages of a column
thrift      the structs that Parquet's headers and footers are. Pure
columns     Arrow columns as plain ones, as numbers and as Python objects
"""
