"""The command line and the supervisor: the top floor, which starts all below it as processes of their own."""
