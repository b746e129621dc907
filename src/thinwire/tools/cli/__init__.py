"""The command line: one thin file per verb, and the application that turns errors into one sentence.

What a verb does belongs to other packages; verbs call them and print.
"""
