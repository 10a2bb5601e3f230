"""Several rows of each prompt: rules that choose the rows to continue and the row to return."""
