"""What users test with: a settable clock, a conformance suite, a simulator, a history checker."""
