// Rates and backlogs over time, drawn by uPlot.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { rates, type Live, type Point } from "./live";
import { clock, rate, number, zone } from "./text";

interface Line {
  name: string;
  /** The name of a colour in the style. */
  colour: string;
  dash?: number[];
  values: (number | null)[];
}

interface ChartProps {
  title: string;
  unit: string;
  points: Point[];
  lines: Line[];
  show: (value: number | null) => string;
}

const HEIGHT = 190;
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

/** What lies between two times on the axis: never less than a second, which would have one label twice. */
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600];

/** Changes when the browser changes between light and dark. */
function useScheme(): boolean {
  const query = useMemo(() => matchMedia("(prefers-color-scheme: dark)"), []);
  const [dark, setDark] = useState(query.matches);
  useEffect(() => {
    const changed = () => setDark(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return dark;
}

function options(width: number, lines: Line[]): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const colour = (name: string) => style.getPropertyValue(`--${name}`).trim();
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, points: { show: false } },
    scales: { y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [
      { ...axis, space: 90, size: 28, incrs: SECONDS, values: (_plot, at) => at.map((second) => clock(new Date(second * 1000))) },
      { ...axis, size: 48, values: (_plot, at) => at.map((value) => short.format(value)) },
    ],
    series: [{}, ...lines.map((line) => ({ label: line.name, stroke: colour(line.colour), width: 2, dash: line.dash, points: { show: false } }))],
  };
}

function Chart({ title, unit, points, lines, show }: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const dark = useScheme();
  const [pointed, setPointed] = useState<number | null>(null);
  const data = [points.map((point) => point.at / 1000), ...lines.map((line) => line.values)] as uPlot.AlignedData;
  useEffect(() => {
    const element = place.current!;
    const made = new uPlot({ ...options(element.clientWidth, lines), hooks: { setCursor: [(of) => setPointed(of.cursor.idx ?? null)] } }, data, element);
    plot.current = made;
    const resized = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
    };
  }, [dark]);
  useEffect(() => plot.current?.setData(data), [points]);
  const at = pointed !== null && pointed < points.length ? pointed : points.length - 1;
  const now = lines.map((line) => `${line.name} ${show(line.values[at] ?? null)}`).join(", ");
  return (
    <figure class="chart">
      <figcaption>
        <strong>{title}</strong> <span class="unit">{unit}</span>
        <span class="legend">
          {lines.map((line) => (
            <span key={line.name}><span class={`swatch ${line.colour}${line.dash ? " dashed" : ""}`} aria-hidden="true" /> {line.name} <span class="number value">{show(line.values[at] ?? null)}</span></span>
          ))}
        </span>
      </figcaption>
      <div ref={place} role="img" aria-label={`${title} over time. Now: ${now}`} />
    </figure>
  );
}

export function Charts({ live: { points } }: { live: Live }) {
  if (points.length < 2) return null;
  const first = points[0];
  const has = (pick: (point: Point) => number | null) => points.some((point) => pick(point) !== null);
  const speeds: Line[] = [{ name: "done", colour: "good", values: rates(points, (point) => point.done, "countedAt") }];
  if (has((point) => point.appended)) speeds.push({ name: "appended", colour: "blue", values: rates(points, (point) => point.appended) });
  if (has((point) => point.published)) speeds.push({ name: "published", colour: "violet", dash: [6, 4], values: rates(points, (point) => point.published) });
  if (points.some((point) => (point.claims ?? 0) > 0)) speeds.push({ name: "claims here", colour: "warn", dash: [2, 3], values: rates(points, (point) => point.claims) });
  const waiting: Line[] = [];
  if (has((point) => point.lag)) waiting.push({ name: "lag", colour: "blue", values: points.map((point) => point.lag) });
  waiting.push(
    { name: "leased", colour: "good", values: points.map((point) => point.leased) },
    { name: "retrying", colour: "warn", dash: [6, 4], values: points.map((point) => point.retrying) },
    { name: "parked", colour: "bad", dash: [2, 3], values: points.map((point) => point.parked) },
  );
  return (
    <>
      <h2>Since {clock(new Date(first.at))} {zone(new Date(first.at))}</h2>
      <div class="charts">
        <Chart key={speeds.map((line) => line.name).join()} title="Rates" unit="per second" points={points} lines={speeds} show={rate} />
        <Chart key={waiting.map((line) => line.name).join()} title="Unfinished" unit="records and events" points={points} lines={waiting}
          show={(value) => (value === null ? "–" : number(value))} />
      </div>
    </>
  );
}
