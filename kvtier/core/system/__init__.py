"""Where the core touches the operating system.

- `disk`: the one seam to the file system, at which tests inject faults.
- `mounts`: which file system a folder is on.
- `numa`: which memory and which cores lie near which GPU.
- `abandonable_calls`: calls that may never return, in threads of their own.
- `closing`: closes what was opened together, whatever fails.
"""
