"""The API over the real stores: sources, images, generations, imports and keys, in a real database."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.task import Clock, deferLater

from region.answers.published import PublishedView
from region.answers.releases import Releases
from region.api import Api, ApiKeyStore, Authenticator
from region.api.comparison import from_database
from region.api.images import resource_id
from region.api.oauth import Unauthorized
from region.api.operations import Operation
from region.api.routes import OPERATIONS
from region.images.job import JobStore
from region.images.lock import try_lock
from region.images.plan import Change
from region.images.receiving import Receiver
from region.images.sources import SourceStore
from region.images.store import GenerationStore
from region.images.uploads import UploadStore
from region.nodes.store import NodeStore
from region.scripts.results import ResultStore
from region.scripts.store import ScriptStore
from region.upstream import Problem
from rpc.blobs import BlobStore
from rpc.manifest import Image, Manifest
from rpc.verifying import MIB, Verifier
from tests.database import DatabaseTestCase, reactor
from tests.region.api_parts import parts_of
from tests.region.fakes import EPOCH, Keys, Racks
from tests.region.inventories import FOCAL, NOBLE, NOBLE_ARM, image, loader
from tests.region.web import Connection, Response, form


async def inline(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


class FakeImporter:
    """An importer that only queues."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs
        self.cancelled = 0

    async def request(self, trigger: str = "request") -> int:
        return await self.jobs.enqueue(trigger)

    async def cancel(self) -> None:
        self.cancelled += 1
        await self.jobs.cancel_queued("cancelled on request")

    async def is_importing(self) -> bool:
        return bool(await self.jobs.unfinished())


class StoresTestCase(DatabaseTestCase):
    """An API whose stores are real."""

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for what setUp returns
        return super().setUp().addCallback(lambda _: self.make_api())

    def make_api(self, operations: tuple[Operation, ...] = OPERATIONS) -> None:
        self.clock = Clock()
        self.clock.advance(EPOCH)
        self.jobs = JobStore(self.database)
        self.sources = SourceStore(self.database, cast(Any, inline))
        self.generations = GenerationStore(self.database, cast(Any, inline))
        self.importer = FakeImporter(self.jobs)
        self.blobs = BlobStore(Path(self.mktemp()))
        self.addCleanup(self.blobs.close)
        self.uploads = UploadStore(self.database)
        self.receiver = Receiver(
            self.uploads, self.blobs, "region", 24.0, self.clock, cast(Any, maybeDeferred),
            lambda: self.importer.request("upload"),
        )  # fmt: skip
        self.addCleanup(lambda: self.run_async(self.receiver.stop()))
        self.verifier = Verifier(self.blobs, self.clock, cast(Any, maybeDeferred), self.clock.seconds, MIB, 0)
        view = PublishedView(self.generations)
        parts = parts_of(
            releases=Releases(cast(Any, None), view, self.clock, cast(Any, None), cast(Any, None)),
            published=view,
            racks=Racks(),
            connections=Racks().connections,
            syncs=Racks(),
            sources=self.sources,
            generations=self.generations,
            jobs=self.jobs,
            importer=self.importer,
            uploads=self.uploads,
            receiver=self.receiver,
            verifier=self.verifier,
            scripts=ScriptStore(self.database),
            results=ResultStore(self.database),
            nodes=NodeStore(self.database),
        )
        self.resource = Api(parts, Authenticator(Keys(), self.clock), operations).resource()

    async def ask(self, method: str, path: str, **keywords: Any) -> Response:
        connection = Connection(self.resource, self.clock)
        connection.send(method, path, **keywords)
        while not connection.is_answered:
            # The database is a real one, so its answer comes through the real reactor.
            await deferLater(reactor, 0.001)
        return connection.response(method)

    async def publish(self, *images: Image, changes: tuple[Change, ...] = ()) -> int:
        row = await self.database.one(
            "INSERT INTO import_job (state, trigger) VALUES ('publishing', 'request') RETURNING id"
        )
        assert row is not None
        current = await self.generations.current()
        base = current.number if current else None
        async with self.database.session() as session:
            await try_lock(session)
            generation = await self.generations.publish(session, Manifest(images), changes, row[0], base=base)
        await self.database.execute("UPDATE import_job SET state = 'done', ended = now() WHERE id = %s", (row[0],))
        return generation.number


class Sources(StoresTestCase):
    """``boot-sources/``."""

    async def create(self, **fields: Any) -> Response:
        return await self.ask("POST", "boot-sources/", **form(**{"url": "http://images.example.com/", **fields}))

    async def test_a_source_is_created_read_changed_and_deleted(self) -> None:
        response = await self.create(keyring_data=base64.b64encode(b"keys").decode(), priority=7)
        self.assertEqual(response.status, 201)
        created = response.json
        self.assertEqual(response.headers["Location"], created["resource_uri"])
        self.assertEqual(base64.b64decode(created["keyring_data"]), b"keys")
        path = f"boot-sources/{created['id']}/"
        self.assertEqual((await self.ask("GET", path)).json, created)
        changed = (await self.ask("PUT", path, **form(priority=1))).json
        self.assertEqual((changed["priority"], changed["url"]), (1, created["url"]))
        self.assertEqual((await self.ask("GET", "boot-sources/")).json, [changed])
        response = await self.ask("DELETE", path)
        self.assertEqual((response.status, response.body), (204, b""))
        for method in ("GET", "PUT", "DELETE"):
            response = await self.ask(method, path)
            self.assertEqual((response.status, response.text), (404, f"There is no source {created['id']}."))

    async def test_times_are_as_clients_of_maas_read_them(self) -> None:
        created = (await self.create(allow_unsigned="true")).json["created"]
        read = datetime.strptime(created, "%Y-%m-%dT%H:%M:%S.%f").replace(tzinfo=UTC)
        self.assertLess(abs((datetime.now(UTC) - read).total_seconds()), 3600)

    async def test_a_keyring_may_be_a_file(self) -> None:
        body = (
            b'--B\r\nContent-Disposition: form-data; name="url"\r\n\r\nhttp://images.example.com/\r\n'
            b'--B\r\nContent-Disposition: form-data; name="keyring_filename"\r\n\r\n\r\n'
            b'--B\r\nContent-Disposition: form-data; name="keyring_data"; filename="k"\r\n\r\n\x99\x01\r\n--B--\r\n'
        )
        response = await self.ask("POST", "boot-sources/", body=body, Content_Type="multipart/form-data; boundary=B")
        self.assertEqual((response.status, base64.b64decode(response.json["keyring_data"])), (201, b"\x99\x01"))

    async def test_what_is_wrong_with_a_source_is_said_by_field(self) -> None:
        for fields, field in (
            ({}, "keyring_filename"),
            ({"keyring_data": "!"}, "keyring_data"),
            ({"url": "", "allow_unsigned": "true"}, "url"),
            ({"url": "ftp://x/", "allow_unsigned": "true"}, "url"),
            ({"allow_unsigned": "true", "priority": "high"}, "priority"),
            ({"allow_unsigned": "true", "colour": "red"}, "colour"),
        ):
            response = await self.create(**fields)
            self.assertEqual(
                (response.status, response.headers["Content-Type"]), (400, "application/json; charset=utf-8")
            )
            self.assertIn(field, response.json, fields)

    async def test_the_same_url_twice_is_refused(self) -> None:
        await self.create(allow_unsigned="true")
        response = await self.create(allow_unsigned="true")
        self.assertEqual((response.status, list(response.json)), (400, ["url"]))

    async def test_selections_are_created_read_changed_and_deleted(self) -> None:
        source = (await self.create(allow_unsigned="true")).json["id"]
        base = f"boot-sources/{source}/selections/"
        response = await self.ask("POST", base, **form(os="ubuntu", release="noble", arches=["amd64", "arm64"]))
        self.assertEqual(response.status, 201)
        created = response.json
        self.assertEqual(
            (created["arches"], created["subarches"], created["labels"]), (["amd64", "arm64"], ["*"], ["*"])
        )
        path = f"{base}{created['id']}/"
        self.assertEqual((await self.ask("GET", path)).json, created)
        changed = (await self.ask("PUT", path, **form(labels="stable"))).json
        self.assertEqual(changed, created | {"labels": ["stable"]})
        self.assertEqual((await self.ask("GET", base)).json, [changed])
        self.assertEqual((await self.ask("DELETE", path)).status, 204)
        for method in ("GET", "PUT", "DELETE"):
            self.assertEqual((await self.ask(method, path)).status, 404)

    async def test_what_is_wrong_with_a_selection_is_said_by_field(self) -> None:
        source = (await self.create(allow_unsigned="true")).json["id"]
        base = f"boot-sources/{source}/selections/"
        self.assertEqual(
            (await self.ask("POST", base, **form(os="ubuntu"))).json, {"release": ["This field is required."]}
        )
        response = await self.ask("POST", base, **form(os="../x", release="noble"))
        self.assertEqual((response.status, list(response.json)), (400, ["os"]))
        for path in ("boot-sources/999/selections/", "boot-sources/x/selections/"):
            self.assertEqual((await self.ask("GET", path)).status, 404)
            self.assertEqual((await self.ask("POST", path, **form(os="a", release="b"))).status, 404)


class Resources(StoresTestCase):
    """``boot-resources/``, ``image-generations/`` and ``import-jobs/``."""

    async def test_what_is_published_is_listed_as_boot_resources(self) -> None:
        self.assertEqual((await self.ask("GET", "boot-resources/")).json, [])
        await self.publish(
            image(NOBLE, subarch="ga-24.04", release_title="24.04 LTS", subarches="generic,ga-24.04"), loader()
        )
        boot_loader, noble = (await self.ask("GET", "boot-resources/")).json
        self.assertEqual(
            (noble["name"], noble["architecture"], noble["type"]), ("ubuntu/noble", "amd64/ga-24.04", "Synced")
        )
        self.assertEqual(
            (noble["title"], noble["subarches"], noble["kflavor"]), ("24.04 LTS", "generic,ga-24.04", "generic")
        )
        self.assertEqual((boot_loader["name"], boot_loader["architecture"]), ("grub-efi-signed/uefi", "amd64/generic"))
        self.assertLess(noble["id"], 2**53)

    async def test_a_type_that_there_is_none_of_is_a_bad_type(self) -> None:
        await self.publish(image(NOBLE))
        for kind, count in (("synced", 1), ("all", 1), ("generated", 0), ("uploaded", 0)):
            self.assertEqual(len((await self.ask("GET", f"boot-resources/?type={kind}")).json), count)
        response = await self.ask("GET", "boot-resources/?type=x")
        self.assertEqual((response.status, response.text), (400, "Bad type 'x'"))
        self.assertEqual(response.headers["Content-Type"], "text/plain; charset=utf-8")

    async def test_a_boot_resource_has_its_files(self) -> None:
        noble = image(NOBLE)
        await self.publish(noble)
        found = (await self.ask("GET", f"boot-resources/{resource_id(noble)}/")).json
        (kept,) = found["sets"].values()
        self.assertEqual((kept["version"], kept["size"], kept["complete"]), ("20260101", 3000, True))
        self.assertEqual(set(kept["files"]), {"boot-kernel", "boot-initrd", "squashfs"})
        self.assertEqual(kept["files"]["squashfs"]["filetype"], "squashfs")
        self.assertTrue(all(file["complete"] and len(file["sha256"]) == 64 for file in kept["files"].values()))
        for wrong in ("1", "x", "9" * 30):
            self.assertEqual((await self.ask("GET", f"boot-resources/{wrong}/")).status, 404)

    async def test_a_new_version_of_an_image_keeps_its_number(self) -> None:
        self.assertEqual(resource_id(image(NOBLE, "1")), resource_id(image(NOBLE, "2")))
        self.assertNotEqual(resource_id(image(NOBLE)), resource_id(image(NOBLE_ARM)))

    async def test_an_image_says_which_generation_last_brought_it(self) -> None:
        noble, focal = image(NOBLE), image(FOCAL)
        first = await self.publish(noble, changes=(Change("added", noble, "it is selected"),))
        seen = [[(one["name"], one["generation"]) for one in (await self.ask("GET", "boot-resources/")).json]]
        second = await self.publish(noble, focal, changes=(Change("added", focal, "it is selected"),))
        newer = image(NOBLE, "20260202")
        third = await self.publish(newer, focal, changes=(Change("changed", newer, "it is new"),))
        resources = (await self.ask("GET", "boot-resources/")).json
        seen.append([(one["name"], one["generation"]) for one in resources])
        self.assertEqual(seen, [[("ubuntu/noble", first)], [("ubuntu/focal", second), ("ubuntu/noble", third)]])
        one = (await self.ask("GET", resources[0]["resource_uri"])).json
        self.assertEqual((one["generation"], one["last_update"]), (second, resources[0]["last_update"]))

    async def test_an_image_says_how_many_machines_are_deployed_with_it(self) -> None:
        await self.publish(image(NOBLE), image(NOBLE_ARM), image(FOCAL))
        for number, (status, release, architecture) in enumerate((
            (6, "noble", "amd64/generic"), (6, "noble", "amd64/hwe-24.04"), (6, "noble", "arm64/generic"),
            (4, "focal", "amd64/generic"), (6, "", "amd64/generic"),
        )):  # fmt: skip
            await self.database.execute(
                "INSERT INTO node (system_id, hostname, architecture, status, osystem, distro_series)"
                " VALUES (%s, %s, %s, %s, 'ubuntu', %s)",
                (f"node0{number}", f"n{number}", architecture, status, release),
            )
        listed = (await self.ask("GET", "boot-resources/")).json
        counted = {(one["name"], one["architecture"].partition("/")[0]): one["machines_deployed"] for one in listed}
        self.assertEqual(
            counted, {("ubuntu/noble", "amd64"): 2, ("ubuntu/noble", "arm64"): 1, ("ubuntu/focal", "amd64"): 0}
        )
        for one in listed:
            self.assertEqual((await self.ask("GET", one["resource_uri"])).json["machines_deployed"],
                             one["machines_deployed"])  # fmt: skip

    async def test_an_import_is_begun_followed_and_stopped(self) -> None:
        response = await self.ask("POST", "boot-resources/?op=import")
        self.assertEqual((response.status, response.text), (200, "Import of boot resources started"))
        location = response.headers["Location"]
        job = (await self.ask("GET", location)).json
        self.assertEqual((job["state"], job["trigger"], job["problems"]), ("queued", "request", []))
        self.assertIs((await self.ask("GET", "boot-resources/?op=is_importing")).json, True)
        again = await self.ask("POST", "boot-resources/", **form(op="import"))
        self.assertEqual(again.headers["Location"], location)
        response = await self.ask("POST", "boot-resources/?op=stop_import")
        self.assertEqual((response.status, response.text), (200, "Import of boot resources is being stopped"))
        self.assertIs((await self.ask("GET", "boot-resources/?op=is_importing")).json, False)
        self.assertEqual((await self.ask("GET", location)).json["state"], "cancelled")

    async def test_an_import_has_its_problems(self) -> None:
        job = await self.jobs.enqueue("timer")
        problem = Problem("error", "http://x/", "com.example:noble", "20260101", "squashfs", "the sha256 is wrong")
        await self.jobs.add_problems(self.database, job, [problem])
        found = (await self.ask("GET", f"import-jobs/{job}/")).json
        self.assertEqual(found["problems"][0]["product"], "com.example:noble")
        self.assertEqual([one["id"] for one in (await self.ask("GET", "import-jobs/?limit=1")).json], [job])
        self.assertEqual((await self.ask("GET", "import-jobs/999/")).status, 404)
        self.assertEqual((await self.ask("GET", "import-jobs/?limit=0")).json, {"limit": ["0 is less than 1."]})

    async def test_generations_say_what_changed_and_why(self) -> None:
        noble, focal = image(NOBLE), image(FOCAL)
        first = await self.publish(noble, changes=(Change("added", noble, "it is selected"),))
        second = await self.publish(noble, focal, changes=(Change("added", focal, "it is selected"),))
        newest, older = (await self.ask("GET", "image-generations/")).json
        self.assertEqual(
            (newest["number"], newest["current"], newest["images"], newest["size"]), (second, True, 2, 6000)
        )
        self.assertEqual((older["number"], older["current"]), (first, False))
        (change,) = (await self.ask("GET", older["resource_uri"])).json["changes"]
        self.assertEqual((change["kind"], change["release"], change["reason"]), ("added", "noble", "it is selected"))
        for wrong in ("999", "0", "x"):
            response = await self.ask("GET", f"image-generations/{wrong}/")
            self.assertEqual(response.status, 404)

    async def test_the_list_that_the_benchmark_compares_with_has_the_same_releases(self) -> None:
        await self.publish(image(NOBLE, release_title="24.04 LTS"), image(NOBLE_ARM), image(FOCAL), loader())
        self.make_api((*OPERATIONS, from_database(self.database)))
        document = (await self.ask("GET", "releases-from-database/")).json
        names = {entry["name"]: [one["arch"] for one in entry["architectures"]] for entry in document["releases"]}
        self.assertEqual(names, {"ubuntu/focal": ["amd64"], "ubuntu/noble": ["amd64", "arm64"]})
        self.assertEqual(document["releases"][1]["title"], "24.04 LTS")
        document = (await self.ask("GET", "releases-from-database/?arch=arm64")).json
        self.assertEqual([entry["name"] for entry in document["releases"]], ["ubuntu/noble"])
        self.assertEqual((await self.ask("GET", "boot-resources/")).status, 200)


class KeyStore(StoresTestCase):
    """API keys in the database."""

    async def test_a_key_that_was_made_is_found_and_one_that_was_revoked_is_not(self) -> None:
        store = ApiKeyStore(self.database)
        key = await store.create("juju")
        self.assertEqual([len(part) for part in key.text.split(":")], [18, 18, 32])
        self.assertEqual(await store.find(key.consumer_key, key.token_key), key)
        self.assertEqual(await store.list(), (key,))
        self.assertTrue(await store.revoke(key.consumer_key, key.token_key))
        self.assertFalse(await store.revoke(key.consumer_key, key.token_key))
        self.assertIsNone(await store.find(key.consumer_key, key.token_key))

    async def test_a_revoked_key_is_forgotten_by_other_processes_at_once(self) -> None:
        store = ApiKeyStore(self.database)
        key = await store.create("juju")
        authenticator = Authenticator(store, self.clock)
        other = self.make(self.dsn)
        await other.start()
        heard: Deferred[None] = Deferred()
        connected: Deferred[None] = Deferred()

        def forget(payload: str) -> None:
            authenticator.forget(payload)
            (heard if connected.called else connected).callback(None)

        ApiKeyStore(other).listen(forget)
        await connected
        header = (
            f'OAuth oauth_signature_method="PLAINTEXT", oauth_consumer_key="{key.consumer_key}", '
            f'oauth_token="{key.token_key}", oauth_signature="%26{key.token_secret}"'
        )
        self.assertEqual((await authenticator.authenticate(header)).name, "juju")
        await store.revoke(key.consumer_key, key.token_key)
        await heard
        await self.assertFailure(Deferred.fromCoroutine(authenticator.authenticate(header)), Unauthorized)
