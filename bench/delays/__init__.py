"""`python -m bench delays`: the same delayed work on hadelay and on the systems that its users would pick instead."""
