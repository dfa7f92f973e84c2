"""What a publish is made of: ranks meet, each makes its share, a driver takes its machine through the attempt.

``publisher`` puts the rooms together; read it first.
"""
