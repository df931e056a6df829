"""The command line: one file for each group of verbs, each imported only when its verb is typed."""
