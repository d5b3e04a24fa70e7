"""The command line `tbench2`."""
