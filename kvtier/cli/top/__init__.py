"""`kvtier top`: what servers do with their cache, read from their /metrics again and again.

- `command`: the command, and the picture in a terminal.
- `page`: the same for a browser, with `page.html`.
- `figures`: what the /metrics of servers say, in the figures that both show.
"""
