"""Lines with an error each; comments tell what a checker's message has."""

import keras_towers as kt

kt.TowerStrategy("bogus")  # list[int | str]
kt.TowerStrategy(towers=2.5)  # "towers"
kt.TowerStrategy(mode="bogus")  # "mode"
kt.TowerStrategy(batches="bogus")  # "batches"
kt.TowerStrategy(updates="bogus")  # "updates"
kt.TowerStrategy(packer=8)  # "packer"
kt.TowerStrategy(batch_norm="bogus")  # "batch_norm"
kt.TowerStrategy(bogus=1)  # "bogus"
print(kt.TowerStrategy().transport)  # "transport"
kt.ParameterServerTowerStrategy(ps_device="tpu")  # "ps_device"
kt.AsyncTowerStrategy(average=True)  # "average"
kt.HorovodStrategy(compression="bogus")  # "compression"
kt.HorovodStrategy(batches="bogus")  # "batches"
kt.HorovodStrategy(bogus=1)  # "bogus"
kt.NoOpStrategy(logs=[1.0])  # "logs"
kt.strategy(2)  # "str"
kt.extending.ComposedStrategy(mode=3)  # "mode"
kt.extending.ComposedStrategy(transport=3)  # "transport"
kt.extending.ComposedStrategy(placement="host")  # "placement"
kt.extending.StatefulHook()  # StatefulHook
kt.virtual_towers(towers="2")  # "towers"
print(kt.bogus)  # "bogus"
