"""The command line: one thin file per verb, and the application that turns our errors into one sentence.

What does not live here: anything a verb does; verbs call other packages and print.
"""
