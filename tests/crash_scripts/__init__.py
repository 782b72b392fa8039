"""Scripts that crash, each of one kind; see the tests of the doctor's crashes."""
