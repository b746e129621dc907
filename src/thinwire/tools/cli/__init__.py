"""The command line: one thin file per verb, whose options are a record, and what turns records into commands.

What a verb does belongs to other packages; verbs call them and print.
"""
