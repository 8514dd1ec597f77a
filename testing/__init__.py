"""The conformance kit: what a backend has to do right, as cases, references and tolerances."""
