"""What the benchmark compares with: checkpoint pairs, the field's encodings, entropy bounds."""
