"""Tests of real libraries on real ranks: a folder for each system, and here what is of all of them."""
