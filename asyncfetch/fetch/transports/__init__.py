"""One file per way to reach bytes; each fills a Download or raises an error of ours."""
