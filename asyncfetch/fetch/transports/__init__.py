"""Transports; ``engine`` chooses one by the scheme of a url.

http            web servers, by connections of ours; session: by aiohttp's, through the environment's proxies
s3, s3_upload   S3 over http: signatures; uploads in parts
hub             the Hugging Face Hub over http
file            files of this machine
fsspec          all schemes of fsspec, in threads of its own (fsspec_threads)
"""
