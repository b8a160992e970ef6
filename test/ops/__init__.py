"""The op rows of each family. A package, so that `run_all_tests.py` can import `ops.test_<family>`."""
