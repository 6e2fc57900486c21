"""Stack files, the machine, and the engines that use them."""
