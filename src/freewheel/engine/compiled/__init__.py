"""Steps of models of Llama's shape in float32 on a CPU, compiled for the processor at hand.

Needs a C++ compiler with OpenMP when a replica starts; without one the engine computes with
torch's own operations.
"""
