"""Collections of videos, as tables of entries.

listing     files below a directory, by a store or by a web server's index pages
patterns    patterns of urls: braces and wildcards
tar_index   indexes beside tar shards: Energon's, DALI's, wids's. Pure
tars        tar shards as WebDataset writes them
folders     folders and prefixes; VideoFolder's metadata
"""
