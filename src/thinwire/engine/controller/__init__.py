"""Which plan is in force: made once, or from what is measured while training goes on."""
