"""Builders, harnesses and fixtures' parts that tests of several folders share; no test is in here."""
