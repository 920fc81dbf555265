"""MD5 checksums of published dataset files, and the sizes in bytes that are known.

Those of the MNIST and Fashion-MNIST files are given twice: as published (compressed) and of what is in them.
"""

from __future__ import annotations

from typing import NamedTuple


class IdxFile(NamedTuple):
    name: str
    md5: str
    md5_unpacked: str | None
    size: int


_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
MNIST = (
    IdxFile(f"train-{_IMAGES}", "f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb", 9912422),
    IdxFile(f"train-{_LABELS}", "d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624", 28881),
    IdxFile(f"t10k-{_IMAGES}", "9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea", 1648877),
    IdxFile(f"t10k-{_LABELS}", "ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637", 4542),
)
FASHION_MNIST = (
    IdxFile(f"train-{_IMAGES}", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a", 26421880),
    IdxFile(f"train-{_LABELS}", "25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9", 29515),
    IdxFile(f"t10k-{_IMAGES}", "bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a", 4422102),
    IdxFile(f"t10k-{_LABELS}", "bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965", 5148),
)
KMNIST = (
    IdxFile(f"train-{_IMAGES}", "bdb82020997e1d708af4cf47b453dcf7", None, 18165135),
    IdxFile(f"train-{_LABELS}", "e144d726b3acfaa3e44228e80efcd344", None, 29497),
    IdxFile(f"t10k-{_IMAGES}", "5c965bf0a639b31b8f53240b1b52f4d7", None, 3041136),
    IdxFile(f"t10k-{_LABELS}", "7320c461ea6c1c855c0b718fb2a4b134", None, 5120),
)
USPS = {"usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197", "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118"}
CIFAR10_BINARY = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10_PICKLED = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR10_C = {  # with .npy after each name
    "brightness": "0a81ef75e0b523c3383219c330a85d48",
    "contrast": "3c8262171c51307f916c30a3308235a8",
    "defocus_blur": "7d1322666342a0702b1957e92f6254bc",
    "elastic_transform": "9421657c6cd452429cf6ce96cc412b5f",
    "fog": "7b397314b5670f825465fbcd1f6e9ccd",
    "frost": "31f6ab3bce1d9934abfb0cc13656f141",
    "gaussian_blur": "c33370155bc9b055fb4a89113d3c559d",
    "gaussian_noise": "ecaf8b9a2399ffeda7680934c33405fd",
    "glass_blur": "7361fb4019269e02dbf6925f083e8629",
    "impulse_noise": "2090e01c83519ec51427e65116af6b1a",
    "jpeg_compression": "2b9cc4c864e0193bb64db8d7728f8187",
    "labels": "c439b113295ed5254878798ffe28fd54",
    "motion_blur": "fffa5f852ff7ad299cfe8a7643f090f4",
    "pixelate": "0f14f7e2db14288304e1de10df16832f",
    "saturate": "1cfae0964219c5102abbb883e538cc56",
    "shot_noise": "3a7239bb118894f013d9bf1984be7f11",
    "snow": "bb238de8555123da9c282dea23bd6e55",
    "spatter": "8a5a3903a7f8f65b59501a6093b4311e",
    "speckle_noise": "ef00b87611792b00df09c0b0237a1e30",
    "zoom_blur": "6ea8e63f1c5cdee1517533840641641b",
}
CIFAR100_C = {  # with .npy after each name
    "brightness": "f22d7195aecd6abb541e27fca230c171",
    "contrast": "322bb385f1d05154ee197ca16535f71e",
    "defocus_blur": "d923e3d9c585a27f0956e2f2ad832564",
    "elastic_transform": "a0792bd6581f6810878be71acedfc65a",
    "fog": "4efc7ebd5e82b028bdbe13048e3ea564",
    "frost": "3a39c6823bdfaa0bf8b12fe7004b8117",
    "gaussian_blur": "5204ba0d557839772ef5a4196a052c3e",
    "gaussian_noise": "ecc4d366eac432bdf25c024086f5e97d",
    "glass_blur": "0bf384f38e5ccbf8dd479d9059b913e1",
    "impulse_noise": "3b3c210ddfa0b5cb918ff4537a429fef",
    "jpeg_compression": "c851b7f1324e1d2ffddeb76920576d11",
    "labels": "bb4026e9ce52996b95f439544568cdb2",
    "motion_blur": "732a7e2e54152ff97c742d4c388c5516",
    "pixelate": "96c00c60f144539e14cffb02ddbd0640",
    "saturate": "c0697e9fdd646916a61e9c312c77bf6b",
    "shot_noise": "b0a1fa6e1e465a747c1b204b1914048a",
    "snow": "0237be164583af146b7b144e73b43465",
    "spatter": "12ccf41d62564d36e1f6a6ada5022728",
    "speckle_noise": "e3f215b1a0f9fd9fd6f0d1cf94a7ce99",
    "zoom_blur": "0204613400c034a81c4830d5df81cb82",
}
