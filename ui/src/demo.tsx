// The buttons of `hapax demo --page`. Only the demo's server has their routes.
import { useState } from "preact/hooks";
import { post, type Demo } from "./api";
import { useLoad } from "./live";
import { Notice, number, visible } from "./text";

const ACTS = [
  { what: "kill", name: "Kill a worker", about: "kill -9 in the middle of whatever it does; another takes its place" },
  { what: "freeze", name: "Freeze a worker", about: "for longer than its lease; it wakes up and finds that others went on" },
  { what: "cut", name: "Cut the database", about: "nobody can write to the ledger for five seconds" },
  { what: "storm", name: "Storm of duplicates", about: "recent events are delivered five more times, in any order" },
];

export function DemoPanel({ tick }: { tick: number | undefined }) {
  const [pressed, setPressed] = useState(0);
  const { data } = useLoad<Demo>("/v1/demo", `${tick}/${pressed}`);
  const [busy, setBusy] = useState<string | null>(null);
  const [said, setSaid] = useState<{ kind: "good" | "warn"; text: string } | null>(null);
  const act = (what: string) => {
    setBusy(what);
    post<{ said: string }>("/v1/demo/chaos", { what })
      .then((answer) => setSaid({ kind: "good", text: answer.said }), (error) => setSaid({ kind: "warn", text: error.message }))
      .finally(() => {
        setBusy(null);
        setPressed((count) => count + 1);
      });
  };
  return (
    <section class="demo" aria-labelledby="demo-title">
      <h2 id="demo-title">Break the demo</h2>
      {data && (
        <p class="small"><span class="number">{number(data.effects)}</span> of <span class="number">{number(data.events)}</span> effects made, {" "}
          <span class="number">{number(data.caught)}</span> duplicates caught, <span class="number">{number(data.kills)}</span> processes killed, {" "}
          <span class="number">{number(data.frozen)}</span> frozen. A witness counts the effects at the end. Caught is every write and delivery that came again, also while its effect was still to come; “Not done twice” counts only those whose effect was done.</p>
      )}
      <ul class="acts">
        {ACTS.map(({ what, name, about }) => (
          <li key={what}>
            <button type="button" class="second" disabled={busy !== null} onClick={() => act(what)} aria-describedby={`about-${what}`}>{name}</button>
            <span id={`about-${what}`} class="small">{about}</span>
          </li>
        ))}
      </ul>
      {said && <Notice kind={said.kind}>{visible(said.text)}</Notice>}
      {data && (
        <ol class="news" aria-label="What happened last">
          {data.news.map((one) => <li key={`${one.at_s}${one.said}`}><span class="number at">{one.at_s.toFixed(1)} s</span> {visible(one.said)}</li>)}
        </ol>
      )}
    </section>
  );
}
