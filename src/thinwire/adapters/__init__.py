"""The places where thinwire plugs into other people's training loops, one file each.

What does not live here: methods, the exchange, state (floors below); adapters only translate.
"""
