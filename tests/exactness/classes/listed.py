"""Names of Keras that are not compared with one device, and the reasons."""

# Not what a step of training is made of.
NO_PART = {
    "InputLayer": "every functional model has one",
    "InputSpec": "describes inputs",
    "Layer": "the base class",
    "Wrapper": "the base class of layers around layers",
    "FlaxLayer": "runs on JAX only",
    "JaxLayer": "runs on JAX only",
    "TorchModuleWrapper": "runs on PyTorch only",
    "Loss": "the base class",
    "Metric": "the base class",
    "Optimizer": "the base class",
    "OptimizerMap": "describes optimizers",
}
